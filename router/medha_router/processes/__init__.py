"""Several router processes behind one port, for more cores than one."""
