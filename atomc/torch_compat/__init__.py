"""The only folder that touches what torch does not promise. Tested with torch 2.11 and 2.13."""
