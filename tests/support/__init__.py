"""What tests share: conversations and their comparison, checks for what was left behind."""
