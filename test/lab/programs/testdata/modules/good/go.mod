module example.invalid/good

go 1.26.0
