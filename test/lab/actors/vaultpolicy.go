package actors

import (
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// rule is one path block of a policy.
type rule struct {
	path         string
	capabilities []string
}

var (
	policyBlock  = regexp.MustCompile(`(?s)path\s+"([^"]+)"\s*\{(.*?)\}`)
	policyGrants = regexp.MustCompile(`(?s)capabilities\s*=\s*\[(.*?)\]`)
	policyWord   = regexp.MustCompile(`"([a-z]+)"`)
	policyNote   = regexp.MustCompile(`(?m)(^|\s)(#|//).*$`)

	errPolicy = errors.New("no path block with capabilities found")
)

// parsePolicy reads the path blocks and capabilities of an ACL policy in HCL;
// parameter constraints and templates are not known.
func parsePolicy(text string) ([]rule, error) {
	text = policyNote.ReplaceAllString(text, "")
	var rules []rule
	for _, block := range policyBlock.FindAllStringSubmatch(text, -1) {
		grants := policyGrants.FindStringSubmatch(block[2])
		if grants == nil {
			return nil, errPolicy
		}
		r := rule{path: strings.Trim(block[1], "/")}
		if strings.HasSuffix(block[1], "/") {
			r.path += "/"
		}
		for _, word := range policyWord.FindAllStringSubmatch(grants[1], -1) {
			r.capabilities = append(r.capabilities, word[1])
		}
		rules = append(rules, r)
	}
	if len(rules) == 0 && strings.TrimSpace(text) != "" {
		return nil, errPolicy
	}
	return rules, nil
}

// covers says whether a policy path applies: "+" is one element, "*" at the end
// is any rest.
func (r rule) covers(path string) bool {
	prefix, glob := strings.CutSuffix(r.path, "*")
	want, have := strings.Split(prefix, "/"), strings.Split(path, "/")
	if len(have) < len(want) || (!glob && len(have) != len(want)) {
		return false
	}
	for i, w := range want {
		last := i == len(want)-1
		switch {
		case w == "+" || w == have[i]:
		case glob && last && strings.HasPrefix(have[i], w):
		default:
			return false
		}
	}
	return true
}

// permits applies a token's policies to a call; the most exact path decides.
func (v *vault) permits(token *vaultToken, c *vaultCall) bool {
	if slices.Contains(token.policies, "root") {
		return true
	}
	need := map[string][]string{
		http.MethodGet: {"read"}, "LIST": {"list"}, http.MethodDelete: {"delete"}, http.MethodPatch: {"patch"},
		// Whether a write creates depends on what is there; either is enough here.
		http.MethodPost: {"create", "update"},
	}[c.verb]
	path := c.path
	if c.verb == "LIST" {
		path += "/"
	}
	best, granted := -1, []string(nil)
	for _, name := range token.policies {
		rules, err := parsePolicy(v.policy[name])
		if err != nil {
			continue
		}
		for _, r := range rules {
			// A listed path is written with or without its slash.
			if !r.covers(path) && !r.covers(strings.TrimSuffix(path, "/")) {
				continue
			}
			weight := 2 * len(r.path)
			if !strings.ContainsAny(r.path, "*+") {
				weight = 1 << 20
			}
			switch {
			case weight > best:
				best, granted = weight, slices.Clone(r.capabilities)
			case weight == best:
				granted = append(granted, r.capabilities...)
			}
		}
	}
	return !slices.Contains(granted, "deny") && slices.ContainsFunc(need, func(n string) bool { return slices.Contains(granted, n) })
}
