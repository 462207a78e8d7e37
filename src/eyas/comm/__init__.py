"""What the ranks of one model tell each other (D10, D11)."""
