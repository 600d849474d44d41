"""Further APIs over the chat path: OpenAI's Responses and Anthropic's Messages."""
