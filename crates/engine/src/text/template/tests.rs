//! Templates against what Python makes of them.

use super::*;
use crate::text::disarm::MARK;
use serde_json::json;
use std::io::Read as _;
use std::path::Path;

fn render(source: &str, conversation: &Conversation) -> Result<String, TemplateError> {
    Ok(ChatTemplate::new(source, "<s>", "</s>")?.render(conversation, &Guard::default())?.text())
}

fn user(content: &str) -> Conversation {
    let mut conversation = Conversation::new(vec![json!({"role": "user", "content": content})]);
    conversation.now = CivilTime::from_unix(1_741_356_309); // 2025-03-07 14:05:09
    conversation
}

/// Every template of the fixtures over every conversation: the text, or the refusal, of Jinja2 3.1.6 set up as
/// transformers does.
#[test]
fn public_templates_render_as_in_python() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/templates");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
    let conversations: Json = serde_json::from_str(&read("conversations.json")).unwrap();
    let mut compared = 0;
    for name in [
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "SmolLM2-135M-Instruct",
        "google-gemma-2-2b-it",
        "meta-llama-Llama-3.1-8B-Instruct",
        "tiny-chatml",
        "tiny-llama3",
    ] {
        let expected: Json = serde_json::from_str(&read(&format!("{name}.json"))).unwrap();
        let text = |key: &str| expected[key].as_str().unwrap();
        let template = ChatTemplate::new(&read(&format!("{name}.jinja")), text("bos"), text("eos")).unwrap();
        for (case, want) in expected["cases"].as_object().unwrap() {
            let given = &conversations[case];
            let mut conversation = user("");
            conversation.messages = given["messages"].as_array().unwrap().clone();
            conversation.tools = given["tools"].as_array().cloned();
            conversation.add_generation_prompt = given["add_generation_prompt"].as_bool().unwrap_or(true);
            conversation.extra = given["extra"].as_object().cloned().unwrap_or_default();
            let got = template.render(&conversation, &Guard::default());
            let raised = want["error"].as_str().and_then(|error| error.strip_prefix("TemplateError: "));
            match (got, want["text"].as_str(), raised) {
                (Ok(got), Some(want), _) => assert_eq!(got.text(), want, "{name}, {case}"),
                (Err(error), Some(_), _) => panic!("{name}, {case}: {error}"),
                (Err(TemplateError::Refused(got)), None, Some(want)) => {
                    assert_eq!(got, want, "{name}, {case}")
                }
                (got, None, Some(want)) => panic!("{name}, {case}: {got:?}, want the refusal {want:?}"),
                // Where Python fails by a TypeError the outcome is not part of any training text.
                (_, None, None) => continue,
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 86);
}

/// huggingface/text-generation-inference#2987, oobabooga/textgen#6675, lmstudio-ai/lmstudio-bug-tracker#577,
/// mitsuhiko/minijinja#815: (template, text) for one user message "hi".
#[test]
fn text_generation_inference_2987_helpers_follow_jinja2() {
    for (source, want) in [
        ("{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y %Q') }}", "2025-03-07 07 Mar 2025 %Q"),
        ("{{ strftime_now('%H:%M:%S') }}", "14:05:09"),
        ("{%- generation -%}\n a {%- endgeneration %} b", "a b"),
        ("{% generation %}\na\n{% endgeneration %}\nb", "a\nb"),
        (
            "{% set ns = namespace(n=0) %}{% for m in [1,2,3] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}",
            "6",
        ),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "023",
        ),
        (
            "{{ ' a b '.strip().split(' ')[-1] }}{{ 'abc'.startswith('ab') }}{{ [1,2,3][::-1] }}",
            "bTrue[3, 2, 1]",
        ),
        (
            "{{ messages[0].missing }}|{{ missing is defined }}|{{ tools is none }}|{{ tools is defined }}",
            "|False|True|True",
        ),
        (
            "{{ 'a' is sequence }}{{ messages[0] is mapping }}{{ none is iterable }}{{ 'a' is iterable }}",
            "TrueTrueFalseTrue",
        ),
        ("{{ messages | string }}", "[{'role': 'user', 'content': 'hi'}]"),
        ("  {% if true %}  \n  x\n  {% endif %}\ny\n", "  \n  x\ny"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    ] {
        assert_eq!(render(source, &user("hi")).unwrap(), want, "{source}");
    }
}

#[test]
fn failures_name_the_template_and_the_line() {
    for (source, want) in [
        ("a\n{% if %}", "chat_template does not compile: "),
        ("{{ nowhere() }}", "chat_template failed: "),
        ("\n{{ missing.field }}", "(line 2)"),
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
    ] {
        let error = render(source, &user("hi")).unwrap_err().to_string();
        assert!(error.contains(want), "{source}: {error}");
    }
}

#[test]
fn conversations_with_tools_use_their_own_template() {
    let template = ChatTemplate::new("plain", "", "").unwrap().with_tool_use("tools").unwrap();
    let mut conversation = user("hi");
    assert_eq!(template.render(&conversation, &Guard::default()).unwrap().text(), "plain");
    conversation.tools = Some(vec![json!({})]);
    assert_eq!(template.render(&conversation, &Guard::default()).unwrap().text(), "tools");
}

/// The user's `<|end|>` is marked, also in keys, in two parts put side by side, and after the template's trimming;
/// the template's own is not.
#[test]
fn only_the_users_specials_are_marked() {
    let guard = Guard::new(["<|end|>"]);
    let source = "{% for m in messages %}{{ m.content | trim }}{{ m.a | tojson(ensure_ascii=true) }}<|end|>{% endfor %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let message = |content: &str| json!({"content": content, "a": {"é<|end|>": 1}});
    let conversation = Conversation::new(vec![message(" <|end|><|en "), message("d|>")]);
    let rendered = template.render(&conversation, &guard).unwrap();
    let marks = rendered.marked().replace(MARK, "^");
    assert_eq!(marks, r#"<^|end|><^|en{"\u00e9<^|end|>": 1}<|end|>d|>{"\u00e9<^|end|>": 1}<|end|>"#);
    assert_eq!(rendered.text(), marks.replace('^', ""));
}

/// The templates that public models come with, each over one conversation without and with tools: 100 texts and 8
/// refusals of Jinja2 3.1.6 set up as transformers does. How they were made is in the fixtures' README.
#[test]
fn all_public_templates_render_as_in_python() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/templates/public.zip");
    let mut archive = zip::ZipArchive::new(std::fs::File::open(path).unwrap()).unwrap();
    let mut read = |name: &str| {
        let mut text = String::new();
        archive.by_name(name).unwrap().read_to_string(&mut text).unwrap();
        text
    };
    let given: Json = serde_json::from_str(&read("conversation.json")).unwrap();
    let expected: Json = serde_json::from_str(&read("expected.json")).unwrap();
    let mut wrong = Vec::new();
    let (mut texts, mut refusals) = (0, 0);
    for (name, wants) in expected.as_object().unwrap() {
        let template = ChatTemplate::new(&read(&format!("{name}.jinja")), "<s>", "</s>").unwrap();
        for (tools, want) in [None, Some(&given["tools"])].into_iter().zip(wants.as_array().unwrap()) {
            let mut conversation = user("");
            conversation.messages = given["messages"].as_array().unwrap().clone();
            conversation.tools = tools.map(|tools| tools.as_array().unwrap().clone());
            let got = template.render(&conversation, &Guard::default()).map(|rendered| rendered.text());
            match (got, want["text"].as_str(), want["error"].as_str()) {
                (Ok(got), Some(want), _) if got == want => texts += 1,
                (Err(got), None, Some(want)) if same_failure(&got, want) => refusals += 1,
                (got, ..) => wrong.push(format!("{name}, tools {}: {got:?}\nwant {want}", tools.is_some())),
            }
        }
    }
    assert!(wrong.is_empty(), "{} renders differ:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!((texts, refusals), (100, 8));
}

/// Whether a template failed for the reason that Python names: its own message, word for word, or Python's error in the
/// engine's words.
fn same_failure(got: &TemplateError, want: &str) -> bool {
    match got {
        TemplateError::Refused(got) => want.strip_prefix("TemplateError: ") == Some(got),
        TemplateError::Render { reason, .. } => [
            ("not iterable", "not iterable"),
            ("is undefined", "undefined"),
            ("not JSON serializable", "not JSON serializable"),
        ]
        .iter()
        .any(|(python, here)| want.contains(python) && reason.contains(here)),
        TemplateError::Compile { .. } | TemplateError::Part { .. } | TemplateError::Thread { .. } => false,
    }
}

/// cubist38/mlx-openai-server#205, langchain4j/langchain4j#1958: (content, text of it), the same for all roles and with
/// tool calls, under templates for strings alone (in three ways of failing on others) and one for parts and null.
#[test]
fn langchain4j_1958_null_and_parts_are_not_lost() {
    let calls = "{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}|";
    for content in [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m['role'] + ':' + m.content }}",
        "{% if m.content is string %}{{ m.content }}{% elif m.content %}{{ m.content | map(attribute='text') | join('\n') }}{% endif %}",
    ] {
        let source = format!("{{% for m in messages %}}{content}{calls}{{% endfor %}}");
        for role in ["user", "system", "assistant", "tool"] {
            for (content, want) in [
                (None, ""),
                (Some(json!(null)), ""),
                (Some(json!("")), ""),
                (Some(json!([])), ""),
                (Some(json!("text")), "text"),
                (
                    Some(json!([{"type": "text", "text": "a<b"}, {"type": "text", "text": "None"}])),
                    "a<b\nNone",
                ),
            ] {
                for has_calls in [false, true] {
                    let mut message = json!({"role": role});
                    if let Some(content) = &content {
                        message["content"] = content.clone();
                    } else if source.contains('+') {
                        continue; // absent: to add nothing is an error in Python, too
                    }
                    if has_calls {
                        message["tool_calls"] = json!([{"function": {"name": "f", "arguments": {}}}]);
                    }
                    let mut conversation = user("None");
                    conversation.messages.push(message.clone());
                    let got = render(&source, &conversation).unwrap();
                    let head = if source.contains('+') {
                        ["user:", &format!("{role}:")].map(String::from)
                    } else {
                        Default::default()
                    };
                    let call = if has_calls { "!f" } else { "" };
                    assert_eq!(
                        got,
                        format!("{}None|{}{want}{call}|", head[0], head[1]),
                        "{source} {message}"
                    );
                }
            }
        }
        for (part, kind) in [
            (json!({"type": "refusal", "refusal": "no"}), "refusal"),
            (json!({"type": "image_url", "image_url": {}}), "image_url"),
            (json!({"type": "text"}), "text"),
            (json!(1), "without a type"),
        ] {
            let mut conversation = user("hi");
            conversation
                .messages
                .push(json!({"role": "user", "content": [{"type": "text", "text": "a"}, part]}));
            let error = render(&source, &conversation).unwrap_err().to_string();
            assert!(error.contains("message 1") && error.contains(kind), "{error}");
        }
    }
}
