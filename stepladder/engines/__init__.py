"""What generates tokens: the protocol, the in-process engine, a scripted one for tests."""
