package bench

import (
	"math/rand/v2"
	"strings"
)

// seed is that of all prompts, so that two boxes are asked alike.
const seed = 0x6c6c6d626f78

// saltedWords is how many words at a prompt's beginning belong to one run alone. vLLM
// keeps what it computed for a prompt's beginning, block by block of 16 tokens, and a
// block counts as the same only if everything before it is the same too: so other first
// words make everything behind them new.
const saltedWords = 8

// vocabulary has common words, most of them one token with the blank before them.
const vocabulary = `apple river stone window garden silver winter summer market bridge
	paper letter number signal music travel forest island mountain valley harbor engine
	metal glass water light shadow corner street morning evening story reason answer
	question measure machine system network station library kitchen doctor teacher farmer
	painter captain soldier village country history science nature weather season color
	green yellow purple orange simple heavy narrow quiet gentle sudden early second third`

// prompt is the text of one question: about as many tokens as words. salt decides its
// first words, the fixed seed the others.
func prompt(salt uint64, level, index, words int) string {
	list := strings.Fields(vocabulary)
	own := uint64(level)<<32 | uint64(index)                                          // #nosec G115 -- small counters
	first, rest := rand.New(rand.NewPCG(salt, own)), rand.New(rand.NewPCG(seed, own)) // #nosec G404 -- nothing secret hangs on it
	var b strings.Builder
	for i := range words {
		from := rest
		if i < saltedWords {
			from = first
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(list[from.IntN(len(list))])
	}
	return b.String()
}
