package config

import "strings"

// nearest finds the candidate that a person most likely meant by word, or "".
func nearest(word string, candidates []string) string {
	best, bestDistance := "", 0
	lower := strings.ToLower(word)
	limit := max(2, len(word)/3)
	for _, c := range candidates {
		if strings.EqualFold(c, word) {
			return c
		}
		d := distance(lower, strings.ToLower(c))
		if d <= limit && d < len(c) && (best == "" || d < bestDistance) {
			best, bestDistance = c, d
		}
	}
	if best != "" {
		return best
	}
	// A longer word around the right one ("modelName") or a piece of it ("cidr").
	for _, c := range candidates {
		lc := strings.ToLower(c)
		if len(lc) > 2 && len(lower) > 2 && (strings.Contains(lower, lc) || strings.Contains(lc, lower)) {
			return c
		}
	}
	return ""
}

// distance counts the edits between two words: insert, delete, replace, and swap
// of neighbours, each once.
func distance(a, b string) int {
	const longest = 64 // beyond any key; bounds the work on hostile input
	if len(a) > longest || len(b) > longest {
		return longest
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
