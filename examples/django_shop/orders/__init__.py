"""Orders of the shop, and the receipts that they cause."""
