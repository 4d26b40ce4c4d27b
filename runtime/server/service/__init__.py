"""What all endpoints share: the service, its model, and one generation."""
