"""The parts of mixtures of experts that only the table of docs/moe.md combines."""
