"""The processes of engines, and their clients in the server."""
