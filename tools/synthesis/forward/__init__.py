"""`slimrl-tools synthesize forward`: plans of tool calls, executed and then told as tasks."""
