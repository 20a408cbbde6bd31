"""What the control plane's retention policy saves, replayed over recorded sessions."""
