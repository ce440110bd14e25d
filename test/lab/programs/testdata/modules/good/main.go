// Command good is compiled by a test.
package main

import "fmt"

var version = "unset"

func main() { fmt.Print(version) }
