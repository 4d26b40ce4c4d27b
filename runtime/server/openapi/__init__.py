"""The description of the server's endpoints for clients, and its page."""
