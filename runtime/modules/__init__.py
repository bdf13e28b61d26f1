"""What modules become: parallel layers with local parameters, and changes to torch's layers."""
