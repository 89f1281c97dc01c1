"""long_tailed"""
