"""What every HTML page shares: one offline file, its words and numbers, its finding cards, its charts."""
