"""Text sources, tokenizers and the resumable sample order."""
