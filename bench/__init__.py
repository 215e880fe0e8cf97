"""Programs that print numbers. Nothing in the product imports them."""
