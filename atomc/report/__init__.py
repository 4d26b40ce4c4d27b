"""What the compiler did: records, report, contract, and their rendering as text and HTML."""
