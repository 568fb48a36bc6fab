print("the code of the golden files' jobs")
