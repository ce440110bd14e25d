package doctor

import "testing"

func TestLately(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, log, want string }{
		{"nothing", "", ""},
		{"without times", "a\nb\n", "a\nb\n"},
		{"klog", "E1201 04:36:18.494352 218 x.go:1] old\nthat goes on\nE1201 05:36:18.494352 218 x.go:1] new\n", "that goes on\nE1201 05:36:18.494352 218 x.go:1] new\n"},
		{"k3s", "time=\"2026-06-15T10:00:00Z\" level=error msg=old\ntime=\"2026-06-15T11:00:00+02:00\" level=fatal msg=new", "time=\"2026-06-15T11:00:00+02:00\" level=fatal msg=new"},
		{"journald", "Jun  5 11:00:00 box k3s[1]: old\nJun  5 11:51:00 box k3s[1]: a\nJun  5 12:00:00 box k3s[1]: b\n", "Jun  5 11:51:00 box k3s[1]: a\nJun  5 12:00:00 box k3s[1]: b\n"},
		{"two forms in two zones", "time=\"2026-06-15T10:00:00Z\" a\nI0615 12:00:01.1 1 x] b\n", "time=\"2026-06-15T10:00:00Z\" a\nI0615 12:00:01.1 1 x] b\n"},
		{"no time at all", "time=\"9999-99-99T99:99:99Z\" a\n", "time=\"9999-99-99T99:99:99Z\" a\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := lately(tt.log); got != tt.want {
				t.Errorf("%q\nwant %q", got, tt.want)
			}
		})
	}
}
