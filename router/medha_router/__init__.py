"""The OpenAI-compatible front door: admits, orders and places requests by relative slack."""
