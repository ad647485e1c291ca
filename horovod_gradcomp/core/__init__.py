"""Everything that needs no framework: codec protocol, memory, exchange, plan, random, packing."""
