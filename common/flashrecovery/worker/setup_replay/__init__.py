"""What a script draws and writes before its first step: recorded, and replayed in a replacement."""
