"""Hold the tasks that edgeq ships, one module each, with the task's kind under the name TASK.

Outputs and labels come in sample by sample; a task's meter turns them into metrics.
"""
