"""All uses of private API of torch. Tested with torch 2.11 and 2.13."""
