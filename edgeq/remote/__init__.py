"""Work with boards over SSH: found by address or name, checked, sent what they lack, and measured on."""
