package repair

import (
	"encoding/base64"
	"net/url"
	"regexp"
	"strings"
)

const redacted = "REDACTED"

// userInfo is what stands between the scheme and the host of a URL.
var userInfo = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s"'<>/@]*@`)

// hider replaces the passwords of proxies in each form in which a program may print
// them.
func hider(proxies []string) *strings.Replacer {
	var pairs []string
	for _, pair := range proxies {
		_, value, _ := strings.Cut(pair, "=")
		u, err := url.Parse(value)
		if err != nil || u.User == nil {
			continue
		}
		password, _ := u.User.Password()
		if password == "" {
			continue
		}
		user := u.User.Username() + ":" + password
		pairs = append(pairs, base64.StdEncoding.EncodeToString([]byte(user)), redacted, u.User.String(), redacted, user, redacted)
		// A password of a letter or two would take half of any text with it.
		if len(password) > 3 {
			pairs = append(pairs, password, redacted, url.QueryEscape(password), redacted, url.PathEscape(password), redacted)
		}
	}
	return strings.NewReplacer(pairs...)
}

// hidden takes secrets out of a text that is shown or recorded.
func (m *Machine) hidden(text string) string {
	return userInfo.ReplaceAllString(m.hide.Replace(text), "${1}"+redacted+"@")
}
