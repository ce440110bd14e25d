package size

import (
	"os"
	"testing"
)

func TestOwner(t *testing.T) {
	modules := []string{"k8s.io/api", "k8s.io/apimachinery", "example.org/m", "example.org/m/sub"}
	for symbol, want := range map[string]string{
		"k8s.io/api/core/v1.(*Pod).Marshal":        "k8s.io/api",
		"k8s.io/apimachinery/pkg/runtime.init":     "k8s.io/apimachinery",
		"type:.eq.example.org/m/pkg.T":             "example.org/m",
		"go:itab.*example.org/m/sub/x.T,io.Reader": "example.org/m/sub",
		"type:*map[string]int":                     "std and what the compiler makes",
		"net/http.(*Client).Do":                    "std and what the compiler makes",
		"k8s.io/apiextensions/pkg.F":               "std and what the compiler makes",
		"type:*[]example.org/m.Row":                "example.org/m",
	} {
		if got := Owner(symbol, modules); got != want {
			t.Errorf("%s belongs to %s, want %s", symbol, got, want)
		}
	}
}

// What the table adds up to is what the loader maps from the file.
func TestByModuleAddsUp(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	rows, err := ByModule(self, nil)
	if err != nil {
		t.Skipf("this test binary has no symbols: %v", err)
	}
	info, err := os.Stat(self)
	if err != nil {
		t.Fatal(err)
	}
	var sum uint64
	for _, row := range rows {
		sum += row.Code + row.Data
	}
	if whole := uint64(info.Size()); sum > whole || sum < whole/4 {
		t.Errorf("%d bytes are accounted for in a file of %d", sum, whole)
	}
}
