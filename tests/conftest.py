"""What holds for every test."""

import os

# torch's TCPStore asks the name server who each peer is, even 127.0.0.1, at both ends of every
# connection. Tests talk to this machine alone, and a name server that is slow or counts queries
# would stall each connection for seconds: the C library is told to give up before it asks.
os.environ["RES_OPTIONS"] = "attempts:0"
