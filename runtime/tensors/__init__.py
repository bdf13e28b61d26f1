"""Parameters and buffers as DTensors over the mesh, so that stock tools understand them."""
