"""Header names of the mesh."""

KEY = "X-Paddock-Key"
DEADLINE = "X-Paddock-Deadline"
ON_DISCONNECT = "X-Paddock-On-Disconnect"
