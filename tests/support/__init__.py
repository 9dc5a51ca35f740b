"""What several tests share: a real node, served parts, clocks and golden files."""
