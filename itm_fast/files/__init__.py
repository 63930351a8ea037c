"""Write files so that a crash cannot damage them, and read files from untrusted sources."""
