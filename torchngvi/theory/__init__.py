"""What the papers prove, corrected where they are wrong: one module for each paper, checked by the tests."""
