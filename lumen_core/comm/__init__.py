"""Communication between ranks: collectives over c10d or MORI, counted in bytes."""
