"""What a client asked, and how it failed: plain values."""
