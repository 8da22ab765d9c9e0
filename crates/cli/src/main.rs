//! Runs large language models: GGUF or safetensors in, tokens out.
//!
//! The composition root: flags become plain values, values become a device, a model and a tokenizer, and each command is
//! one file. Answers go to standard output, everything else to standard error.

mod bench;
mod chat;
mod check;
mod doctor;
mod error;
mod files;
mod flags;
mod inspect;
mod layout;
mod mix;
mod models;
mod quantize;
mod run;
mod session;
mod slabs;
mod source;
mod synth;
mod sys;
mod term;
mod threads;
mod verify;

use std::io::{Write, stdout};
use std::process::ExitCode;

use error::Result;
use flags::{Cli, Command};

fn main() -> ExitCode {
    sys::end_quietly_on_closed_pipe();
    sys::fail_on_size_limit();
    let cli = match Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match run(&cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            term::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Run(flags) => run::run(flags),
        Command::Chat(flags) => chat::chat(flags),
        Command::Bench(flags) => bench::bench(flags),
        Command::Verify(flags) => verify::verify(flags),
        Command::Inspect(flags) => inspect::inspect(flags),
        Command::Check(flags) => check::check(flags),
        Command::Quantize(flags) => quantize::quantize(flags),
        Command::Synth(flags) => synth::synth(flags),
        Command::Pull(flags) => models::pull(flags),
        Command::List => models::list(),
        Command::Rm(flags) => models::remove(flags),
        Command::Doctor => doctor::doctor(),
        Command::Completions(flags) => {
            // Into memory first: clap takes an output that cannot be written for a defect of the program.
            let mut script = Vec::new();
            clap_complete::generate(flags.shell, &mut Cli::grammar(), "ingle", &mut script);
            let mut out = stdout().lock();
            out.write_all(&script)?;
            Ok(out.flush()?)
        }
    }
}
