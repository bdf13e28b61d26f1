"""Runs plans on real ranks: processes of this machine."""
