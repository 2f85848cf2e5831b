"""Domain to proto (``to_*``) and back (``from_*``).

What comes from the wire is checked here: a missing or impossible field raises ``InvalidRequestError`` whose ``field``
is its path in the message, or ``ProtocolError`` where a peer of ours sent nonsense.
"""
