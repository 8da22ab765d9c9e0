//! `ingle chat`: a conversation. What a person types is read with line editing and history; what a script pipes in, line
//! by line.

use std::fs;
use std::io::{BufRead, ErrorKind, Read, Write, stdin, stdout};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ingle_engine::handle::{Event, TextRequest};
use ingle_engine::request::FinishReason;
use ingle_engine::sampler::{Params, Settings};
use ingle_engine::text::Conversation;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::files;
use crate::flags::Chat;
use crate::session::{self, Session};
use crate::sys::{self, Signals};
use crate::term::{self, Paint};

const HELP: &str = "\
/help             this list
/clear            forget the conversation, keep the system message
/regen            another answer to the last message
/save FILE        write the conversation as JSON; /save! FILE replaces a file
/load FILE        go on with a saved conversation
/system TEXT      set the system message; without TEXT, remove it
/set NAME VALUE   change a setting; without NAME, list what holds
/exit             leave; so does Ctrl-D
Ctrl-C            stop the answer, keep the chat";

/// Longest line of a script.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Talks until the input ends or `/exit`.
///
/// # Errors
/// No model, or one without a template; the input or the output. [`Error::Script`] at the end where lines of a script failed: a
/// person has seen that they did.
pub fn chat(flags: &Chat) -> Result<()> {
    let sampling = flags.sampling.settings()?;
    session::require_device(&flags.device)?;
    let session = session::open(flags.model.named(), &flags.device, &flags.plan)?;
    if session.handle.language().template().map_err(ingle_engine::handle::Error::from)?.is_none() {
        return Err(Error::Refused(format!(
            "{}, so it answers no conversation: `ingle run -m {} TEXT` continues a text",
            session.handle.language().without_template(),
            session.path.display()
        )));
    }
    let mut input = Input::new()?;
    if let Input::Person { .. } = input {
        let said = format!("{} on {}; /help lists commands", session.name, session.device);
        term::say(&Paint::stderr().dim(&said));
    }
    let mut talk = Talk {
        session,
        system: flags.system.clone(),
        messages: Vec::new(),
        sampling,
        max_tokens: flags.max_tokens,
        stop: flags.stop.clone(),
        choice: 0,
        is_full: false,
        knows_full: false,
    };
    while let Some(line) = input.line()? {
        let line = line.trim();
        let outcome = match line.split_once(char::is_whitespace).unwrap_or((line, "")) {
            ("", _) => Ok(()),
            ("/exit" | "/quit", _) => break,
            (command, argument) if command.starts_with('/') => talk.command(command, argument.trim()),
            _ => talk.say(line),
        };
        // What fails in a chat is said, and the chat goes on.
        match outcome {
            Err(error @ Error::Stream(_)) => return Err(error),
            Err(error) => input.failed(&error),
            Ok(()) => {}
        }
    }
    input.close()
}

/// Where lines come from.
enum Input {
    /// A terminal, and the file that remembers what was typed there.
    Person { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    /// A pipe or a file, and how many of its lines failed.
    Script { failed: usize },
}

impl Input {
    fn new() -> Result<Self> {
        if !term::stdin_is_person() {
            return Ok(Input::Script { failed: 0 });
        }
        let mut editor = Box::new(DefaultEditor::new()?);
        let history = sys::state_dir().map(|dir| dir.join("history"));
        if let Some(file) = &history {
            // The first chat has no history yet.
            let _ = editor.load_history(file);
        }
        Ok(Input::Person { editor, history })
    }

    /// The next line; `None` at the end.
    fn line(&mut self) -> Result<Option<String>> {
        match self {
            Input::Person { editor, .. } => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        // A line that cannot be remembered can still be answered.
                        let _ = editor.add_history_entry(&line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(ReadlineError::Interrupted) => term::say("Ctrl-D or /exit leaves"),
                    Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                        term::error(&not_utf8());
                    }
                    Err(error) => return Err(error.into()),
                }
            },
            Input::Script { .. } => loop {
                let mut line = Vec::new();
                if stdin().lock().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
                    return Ok(None);
                }
                // The end of the chat, since such an input is no script and need not have an end.
                if line.len() as u64 > LINE_BYTES_MAX {
                    return Err(Error::Refused(format!(
                        "a line of standard input is longer than {}",
                        term::bytes(LINE_BYTES_MAX)
                    )));
                }
                match String::from_utf8(line) {
                    Ok(line) => return Ok(Some(line)),
                    Err(_) => self.failed(&not_utf8()),
                }
            },
        }
    }

    /// Says why a line failed, and counts it.
    fn failed(&mut self, error: &Error) {
        term::error(error);
        if let Input::Script { failed } = self {
            *failed += 1;
        }
    }

    /// Keeps the history, where there is a place for it.
    ///
    /// # Errors
    /// Lines of a script that failed.
    fn close(self) -> Result<()> {
        let (mut editor, file) = match self {
            Input::Script { failed: 0 } | Input::Person { history: None, .. } => return Ok(()),
            Input::Script { failed } => return Err(Error::Script { failed }),
            Input::Person { editor, history: Some(file) } => (editor, file),
        };
        let dir = file.parent().unwrap_or(Path::new("."));
        let kept =
            fs::create_dir_all(dir).map_err(ReadlineError::from).and_then(|()| editor.save_history(&file));
        if let Err(why) = kept {
            term::say(&format!(
                "note: what was typed is not remembered: cannot write {}: {why}",
                file.display()
            ));
        }
        Ok(())
    }
}

fn not_utf8() -> Error {
    Error::Refused("the line is not UTF-8 and is left out".into())
}

/// A conversation in progress.
struct Talk {
    session: Session,
    system: Option<String>,
    /// Of user and assistant in turn.
    messages: Vec<Value>,
    sampling: Settings,
    max_tokens: usize,
    stop: Vec<String>,
    /// Answers to the last message so far, so that the next one draws other random numbers.
    choice: u32,
    /// Whether the last answer took all that was left of the context.
    is_full: bool,
    /// Whether it has been said what to do about a message that does not fit, since one last did.
    knows_full: bool,
}

impl Talk {
    /// A message of the user's, and its answer. A message that cannot be answered is taken back.
    fn say(&mut self, text: &str) -> Result<()> {
        self.messages.push(json!({ "role": "user", "content": text }));
        self.choice = 0;
        self.answer().inspect_err(|_| {
            self.messages.pop();
        })
    }

    /// Answers the last message; Ctrl-C keeps what there is.
    fn answer(&mut self) -> Result<()> {
        // From here on, since a long message is a while on its way to the model.
        let ctrl_c = Signals::catch_ctrl_c();
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let conversation = Conversation::new(system.chain(self.messages.iter().cloned()).collect());
        let request = TextRequest {
            prompt: self.session.handle.language().chat(&conversation)?,
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            sampling: self.sampling.clone(),
            choice: self.choice,
            ..TextRequest::default()
        };
        let mut out = stdout().lock();
        let mut written = Ok(());
        let mut mid_line = false;
        let reply = self.session.handle.generate(request, &mut |event| {
            if let Some(Event::Text(text)) = event
                && written.is_ok()
            {
                written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
                mid_line = !text.ends_with('\n');
            }
            match written.is_err() || ctrl_c.caught().is_some() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        written?;
        if reply.is_ok() || mid_line {
            writeln!(out)?;
        }
        let reply = reply.map_err(|error| self.in_a_chat(error))?;
        let context = self.session.handle.engine().runner().kv().context;
        self.is_full = reply.prompt_ids.len() + reply.generated_ids.len() >= context;
        self.knows_full = false;
        self.session.warn_of_nan(&reply);
        let paint = Paint::stderr();
        match reply.finish_reason {
            FinishReason::Cancelled => {
                term::say(&paint.dim("(stopped)"));
                if reply.text.is_empty() {
                    return Err(Error::Refused("stopped before the answer began".into()));
                }
            }
            FinishReason::Length => {
                term::say(&paint.dim(&match self.is_full {
                    true => format!(
                        "(cut: the context of {context} tokens is full; /clear forgets the conversation)"
                    ),
                    false => format!("(cut after {} tokens: /set max_tokens N)", reply.generated_ids.len()),
                }));
            }
            FinishReason::Stop => {}
        }
        self.messages.push(json!({ "role": "assistant", "content": reply.text }));
        Ok(())
    }

    /// A context that is full, in the words of a chat: what to do about it is said once.
    fn in_a_chat(&mut self, error: ingle_engine::handle::Error) -> Error {
        use ingle_engine::{Error::Context, handle::Error::Engine};
        let Engine(Context { prompt, context }) = error else { return self.session.advised(error) };
        let advice = match (std::mem::replace(&mut self.knows_full, true), self.is_full) {
            (true, _) => "",
            (false, false) => {
                ": send a shorter one, /clear forgets the conversation, and -c makes the context longer"
            }
            (false, true) => ": /clear forgets the conversation, and -c makes the context longer",
        };
        Error::Refused(format!(
            "with this message the conversation has {prompt} tokens, but the context is {context}{advice}"
        ))
    }

    fn command(&mut self, command: &str, argument: &str) -> Result<()> {
        let takes_none = |what: &str| match argument {
            "" => Ok(()),
            _ => Err(Error::Refused(format!("{what} takes nothing after it, but found '{argument}'"))),
        };
        match command {
            "/help" => {
                takes_none("/help")?;
                writeln!(stdout(), "{HELP}")?;
            }
            "/clear" => {
                takes_none("/clear")?;
                self.messages.clear();
                self.is_full = false;
                confirm("the conversation is forgotten");
            }
            "/regen" => {
                takes_none("/regen")?;
                return self.regenerate();
            }
            "/save" => return self.save(file_of(command, argument)?, false),
            "/save!" => return self.save(file_of(command, argument)?, true),
            "/load" => return self.load(file_of(command, argument)?),
            "/system" => {
                self.system = (!argument.is_empty()).then(|| argument.to_string());
                confirm(if self.system.is_some() { "system message set" } else { "no system message" });
            }
            "/set" => return self.set(argument),
            _ => return Err(Error::Refused(format!("there is no command {command}; /help lists them"))),
        }
        Ok(())
    }

    /// Another answer in place of the last one, which stays if there can be none.
    fn regenerate(&mut self) -> Result<()> {
        let is_answer = self.messages.last().is_some_and(|m| m["role"] == "assistant");
        let last = if is_answer { self.messages.pop() } else { None };
        if self.messages.is_empty() {
            self.messages.extend(last);
            return Err(Error::Refused("there is no message to answer again yet".into()));
        }
        self.choice += 1;
        self.answer().inspect_err(|_| self.messages.extend(last))
    }

    fn save(&self, file: &Path, replaces: bool) -> Result<()> {
        files::require_other(file, &self.session.path)?;
        if !replaces && file.is_file() {
            return Err(Error::Refused(format!(
                "{0} is there already: give another name, or /save! {0} to replace it",
                file.display()
            )));
        }
        let whole = json!({ "system": self.system, "messages": self.messages });
        files::write(file, &format!("{whole:#}\n"), &self.session.path)?;
        confirm(&format!("saved in {}: {}", file.display(), count_of_messages(self.messages.len())));
        Ok(())
    }

    fn load(&mut self, file: &Path) -> Result<()> {
        let bad = |what: String| Error::Content { path: file.to_path_buf(), what };
        let text = files::read_text(file)?;
        let whole: Value = serde_json::from_str(&text).map_err(|e| bad(format!("not JSON: {e}")))?;
        let messages =
            whole["messages"].as_array().ok_or_else(|| bad("it has no list \"messages\"".into()))?;
        let is_message = |m: &Value| {
            ["user", "assistant"].iter().any(|role| m["role"] == *role) && m["content"].is_string()
        };
        if let Some(at) = messages.iter().position(|m| !is_message(m)) {
            return Err(bad(format!(
                "message {at} is not of the form {{\"role\": \"user\" or \"assistant\", \"content\": text}}"
            )));
        }
        self.system = match &whole["system"] {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => return Err(bad(format!("\"system\": want a text or null, found {other}"))),
        };
        self.messages = messages.clone();
        (self.choice, self.is_full) = (0, false);
        confirm(&format!("loaded {}: {}", file.display(), count_of_messages(self.messages.len())));
        Ok(())
    }

    /// Every setting with the value that holds, and whose it is where nobody has set it here.
    fn list_settings(&mut self) -> Result<()> {
        let vocabulary = self.session.handle.engine().runner().model().config.vocabulary;
        let model = self.session.handle.language().defaults();
        let holds = Params::resolve(&self.sampling, model, vocabulary)
            .map_err(|e| Error::Refused(e.to_string()))?
            .settings();
        let [given, model, holds] = [&self.sampling, model, &holds].map(settings_json);
        let mut out = stdout().lock();
        writeln!(out, "max_tokens = {}", self.max_tokens)?;
        for name in given.keys() {
            match (&given[name], &model[name], &holds[name]) {
                (Value::Null, Value::Null, Value::Null) if name == "seed" => writeln!(out, "seed = (drawn)")?,
                (Value::Null, Value::Null, Value::Null) => writeln!(out, "{name} = (off)")?,
                (Value::Null, Value::Null, value) => writeln!(out, "{name} = {value} (default)")?,
                (Value::Null, value, _) => writeln!(out, "{name} = {value} (the model's)")?,
                (value, ..) => writeln!(out, "{name} = {value}")?,
            }
        }
        Ok(())
    }

    /// Sets one value, or lists what holds.
    fn set(&mut self, argument: &str) -> Result<()> {
        if argument.is_empty() {
            return self.list_settings();
        }
        let Some((name, value)) = argument.split_once(char::is_whitespace) else {
            return Err(Error::Refused(format!(
                "/set {argument} what? Write /set NAME VALUE; /set lists the names"
            )));
        };
        let value = value.trim();
        let name = match name {
            "temp" => "temperature",
            "n" => "max_tokens",
            _ => name,
        };
        if name == "max_tokens" {
            let bad = |_| Error::Refused(format!("max_tokens is '{value}'; it must be a number of tokens"));
            self.max_tokens = value.parse().map_err(bad)?;
            confirm(&format!("max_tokens = {value}"));
            return Ok(());
        }
        let mut settings = settings_json(&self.sampling);
        let Some(slot) = settings.get_mut(name) else {
            return Err(Error::Refused(format!("there is no setting '{name}'; /set lists them")));
        };
        let bad = |why: String| Error::Refused(format!("{name} cannot be '{value}': {why}"));
        *slot =
            serde_json::from_str(value).map_err(|_| bad("want a number, or null for the default".into()))?;
        let settings: Settings =
            serde_json::from_value(Value::Object(settings)).map_err(|e| bad(e.to_string()))?;
        let vocabulary = self.session.handle.engine().runner().model().config.vocabulary;
        Params::resolve(&settings, &Settings::default(), vocabulary)
            .map_err(|e| Error::Refused(e.to_string()))?;
        self.sampling = settings;
        confirm(&format!("{name} = {value}"));
        Ok(())
    }
}

/// A line for the person, where the answers of a script are not.
fn confirm(what: &str) {
    term::say(&Paint::stderr().dim(&format!("({what})")));
}

fn count_of_messages(count: usize) -> String {
    format!("{count} message{}", if count == 1 { "" } else { "s" })
}

fn file_of<'a>(command: &str, argument: &'a str) -> Result<&'a Path> {
    match argument {
        "" => Err(Error::Refused(format!("{command} needs the name of a file"))),
        // Standard input and output are the chat itself.
        "-" => Err(Error::Refused(format!("{command} takes no '-': name a file (./- is one)"))),
        _ => Ok(Path::new(argument)),
    }
}

/// Settings by name, all of them, with null for those that are not set. Through text, in which 0.7 of 32 bits is 0.7.
fn settings_json(settings: &Settings) -> Map<String, Value> {
    let text = serde_json::to_string(settings).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
