"""What the papers prove, corrected where they are wrong; one module a paper, checked by the tests."""
