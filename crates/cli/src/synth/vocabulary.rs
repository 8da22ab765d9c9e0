//! A small byte-level vocabulary that reads any text, filled up to a model's size.
//!
//! Its merges are the first 4096 of HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), one a line in `merges.txt`, best
//! first. With the 256 bytes they are enough to write English and code in tokens of some letters each; the tokens after
//! them are called `<unused_N>` and stand for no text that anybody types.

use ingle_tensor::Result;
use ingle_tensor::gguf::Outline;

/// Pairs of tokens in the byte alphabet, one a line, best first.
const MERGES: &str = include_str!("merges.txt");

/// What a family's tokenizer has beside its text: special tokens at their published ids, and rules.
#[derive(Debug)]
pub struct Words {
    /// `tokenizer.ggml.pre`: how text is cut.
    pre: &'static str,
    /// Control tokens.
    specials: &'static [(u32, &'static str)],
    bos: u32,
    eos: u32,
    adds_bos: bool,
    template: &'static str,
}

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
    '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl Words {
    /// SmolLM2's.
    pub const SMOLLM2: Words = Words {
        pre: "smollm",
        specials: &[(0, "<|endoftext|>"), (1, "<|im_start|>"), (2, "<|im_end|>")],
        bos: 1,
        eos: 2,
        adds_bos: false,
        template: CHATML,
    };

    /// Llama 3's.
    pub const LLAMA3: Words = Words {
        pre: "llama-bpe",
        specials: &[
            (128_000, "<|begin_of_text|>"),
            (128_001, "<|end_of_text|>"),
            (128_006, "<|start_header_id|>"),
            (128_007, "<|end_header_id|>"),
            (128_009, "<|eot_id|>"),
        ],
        bos: 128_000,
        eos: 128_009,
        adds_bos: true,
        template: "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + \
            '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
            {{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    };

    /// Qwen3's.
    pub const QWEN3: Words = Words {
        pre: "qwen2",
        specials: &[(151_643, "<|endoftext|>"), (151_644, "<|im_start|>"), (151_645, "<|im_end|>")],
        bos: 151_643,
        eos: 151_645,
        adds_bos: false,
        template: CHATML,
    };

    /// Sets the keys of a tokenizer of `size` tokens.
    ///
    /// # Errors
    /// A key that is there already.
    pub fn describe(&self, size: usize, outline: &mut Outline) -> Result<()> {
        const TEXT: i32 = 1;
        const CONTROL: i32 = 3;
        const UNUSED: i32 = 5;
        let room = size.saturating_sub(self.specials.len() + 256);
        let merges: Vec<&str> = MERGES.lines().take(room).collect();
        let bytes = (0..=255).map(|byte| byte_letter(byte).to_string());
        let text =
            bytes.chain(merges.iter().map(|merge| merge.replacen(' ', "", 1))).map(|text| (text, TEXT));
        let unused = (0..).map(|n| (format!("<unused_{n}>"), UNUSED));
        let mut others = text.chain(unused);
        let tokens = (0..size as u32).map_while(|id| {
            let special = self.specials.iter().find(|(at, _)| *at == id);
            special.map(|(_, text)| (text.to_string(), CONTROL)).or_else(|| others.next())
        });
        let (tokens, types): (Vec<String>, Vec<i32>) = tokens.unzip();

        outline.set("tokenizer.ggml.model", "gpt2")?;
        outline.set("tokenizer.ggml.pre", self.pre)?;
        outline.set("tokenizer.ggml.tokens", &tokens)?;
        outline.set("tokenizer.ggml.token_type", &types)?;
        outline.set("tokenizer.ggml.merges", &merges)?;
        outline.set("tokenizer.ggml.bos_token_id", &self.bos)?;
        outline.set("tokenizer.ggml.eos_token_id", &self.eos)?;
        outline.set("tokenizer.ggml.add_bos_token", &self.adds_bos)?;
        outline.set("tokenizer.chat_template", self.template)
    }
}

/// The letter that stands for a byte in GPT-2's alphabet: printable Latin-1 for itself, the others from U+0100 on.
fn byte_letter(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match is_itself(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&other| !is_itself(other)).count() as u32;
            char::from_u32(0x100 + before).unwrap_or_default()
        }
    }
}
