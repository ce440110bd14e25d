module example.invalid/broken

go 1.26.0
