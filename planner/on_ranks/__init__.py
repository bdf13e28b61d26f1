"""Plans run for real: ranks as processes of this machine."""
