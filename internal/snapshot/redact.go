package snapshot

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// redacted stands where a secret stood.
const redacted = "REDACTED"

var (
	userInfo = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s"'<>]*@`)
	keyValue = regexp.MustCompile(`([A-Za-z0-9_.-]+)(\\*["']?[ \t]*[:=][ \t]*)(\\*"[^"]*"?|'[^']*'?|(?i:bearer|basic)[ \t]+[^\s,;]+|[^\s,;"']+)`)
	flagPair = regexp.MustCompile(`(--?)([A-Za-z0-9][A-Za-z0-9-]*)([ \t]+)("[^"]*"|'[^']*'|[^\s-][^\s]*)`)
	// The forms of tokens that show what they are: Hugging Face, NVIDIA, OpenAI,
	// GitHub, GitLab, AWS, Slack, JSON web tokens and k3s's own.
	knownToken = regexp.MustCompile(`\b(hf_[A-Za-z0-9]{16,}|nvapi-[A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|` +
		`github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|A[KS]IA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|` +
		`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*|K10[0-9a-f]{64}::\S+)`)
	privateKey = regexp.MustCompile(`(?s)-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY-----|\z)`)
)

// redact takes passwords, tokens and keys out of a text. It errs on the side of
// taking too much.
func redact(text string) string {
	if strings.Contains(text, "PRIVATE KEY") {
		text = privateKey.ReplaceAllString(text, redacted)
	}
	var out strings.Builder
	out.Grow(len(text))
	for line := range strings.Lines(text) {
		out.WriteString(redactLine(line))
	}
	return out.String()
}

func redactLine(line string) string {
	if strings.Contains(line, "://") && strings.Contains(line, "@") {
		line = userInfo.ReplaceAllString(line, "${1}"+redacted+"@")
	}
	if slices.ContainsFunc(tokenMarks(), func(mark string) bool { return strings.Contains(line, mark) }) {
		line = knownToken.ReplaceAllString(line, redacted)
	}
	lower := strings.ToLower(line)
	if !slices.ContainsFunc(secretWords(), func(word string) bool { return strings.Contains(lower, word) }) {
		return line
	}
	line = redactPairs(line)
	return replaceGroups(flagPair, line, func(g []string) string {
		if !secretKey(g[2]) {
			return g[0]
		}
		return g[1] + g[2] + g[3] + quotedLike(g[4])
	})
}

// redactPairs also looks into values, which can be pairs themselves:
// Environment="TOKEN=...".
func redactPairs(text string) string {
	return replaceGroups(keyValue, text, func(g []string) string {
		if secretKey(g[1]) && !countOfTokens(g[1], g[3]) {
			return g[1] + g[2] + quotedLike(g[3])
		}
		return g[1] + g[2] + redactPairs(g[3])
	})
}

// countOfTokens says whether a pair is a number of a model's tokens, such as
// max_num_batched_tokens=8192, and no secret.
func countOfTokens(key, value string) bool {
	return strings.HasSuffix(strings.ToLower(key), "tokens") && strings.Trim(value, "0123456789,._") == ""
}

func replaceGroups(pattern *regexp.Regexp, text string, replace func([]string) string) string {
	return pattern.ReplaceAllStringFunc(text, func(match string) string {
		return replace(pattern.FindStringSubmatch(match))
	})
}

// quotedLike keeps the quotes, so that the file stays what it was to a parser.
func quotedLike(value string) string {
	if value != "" && (value[0] == '"' || value[0] == '\'') {
		return value[:1] + redacted + value[:1]
	}
	return redacted
}

// tokenMarks are what knownToken begins with; looking for them is far cheaper.
func tokenMarks() []string {
	return []string{"hf_", "nvapi-", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA", "ASIA", "xox", "eyJ", "K10"}
}

// secretWords are what the name of a secret contains.
func secretWords() []string {
	return []string{"pass", "pwd", "token", "secret", "apikey", "api_key", "api-key", "accesskey", "access_key",
		"access-key", "privatekey", "private_key", "private-key", "credential", "auth", "bearer"}
}

// secretKey says whether the value that belongs to a key is a secret. A key is
// taken apart into words, so that "author" and "bypass" are none.
func secretKey(key string) bool {
	words := splitWords(key)
	if len(words) == 0 {
		return false
	}
	switch words[len(words)-1] {
	case "file", "files", "path", "dir", "type", "ttl", "mode", "method", "enabled", "provider", "class":
		return false
	}
	for i, word := range words {
		switch word {
		case "password", "passwd", "pass", "passphrase", "pwd", "token", "tokens", "secret", "secrets",
			"apikey", "accesskey", "privatekey", "secretkey", "authtoken", "identitytoken", "registrytoken",
			"credential", "credentials", "auth", "authorization", "bearer":
			return true
		case "key":
			if i > 0 && slices.Contains([]string{"api", "access", "private", "secret", "encryption", "account"}, words[i-1]) {
				return true
			}
		}
	}
	return false
}

func splitWords(key string) []string {
	var words []string
	var word strings.Builder
	flush := func() {
		if word.Len() > 0 {
			words = append(words, strings.ToLower(word.String()))
			word.Reset()
		}
	}
	var before rune
	for _, r := range key {
		switch {
		case !unicode.IsLetter(r) && !unicode.IsDigit(r):
			flush()
		case unicode.IsUpper(r) && unicode.IsLower(before):
			flush()
			word.WriteRune(r)
		default:
			word.WriteRune(r)
		}
		before = r
	}
	flush()
	return words
}

// redactYAML takes the secrets out value by value, which also finds those that run
// over several lines. A text that is no YAML is an error, because nothing is then
// known about what it holds.
func redactYAML(text string) (string, error) {
	var document yaml.Node
	if err := yaml.Unmarshal([]byte(text), &document); err != nil {
		return "", fmt.Errorf("left out, no YAML: %w", ErrMalformed)
	}
	if document.Kind == 0 {
		return "", nil
	}
	redactNode(&document, false)
	data, err := yaml.Marshal(&document)
	if err != nil {
		return "", fmt.Errorf("writing YAML: %w", err)
	}
	return string(data), nil
}

func redactNode(n *yaml.Node, secret bool) {
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	switch n.Kind {
	case yaml.ScalarNode:
		if secret {
			*n = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: redacted}
			return
		}
		n.Value = redactLog(n.Value)
	case yaml.AliasNode:
		// What it stands for is redacted where it is written.
		if secret {
			*n = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: redacted}
		}
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			redactNode(n.Content[i], false)
			value := n.Content[i+1]
			// "auth:" in registries.yaml is a section whose user name is none.
			hidden := secretKey(n.Content[i].Value)
			section := value.Kind == yaml.MappingNode
			redactNode(value, secret || hidden && !section)
		}
	default:
		for _, child := range n.Content {
			redactNode(child, secret)
		}
	}
}
