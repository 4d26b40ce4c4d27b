"""One conversation: its prompt, its images, and the tools that it may call."""
