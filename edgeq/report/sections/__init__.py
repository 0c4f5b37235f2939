"""The report's sections: functions from data to markup, empty where there is nothing to show."""
