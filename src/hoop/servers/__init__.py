"""The processes: a device server and a coordinator. They move bytes and call the rooms below; rules live there."""
