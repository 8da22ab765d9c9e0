//! Which files make a model, told from their names alone.

/// Files of a safetensors folder besides the weights; only `config.json` must be there.
const FOLDER_FILES: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", CONFIG];

/// The file that makes a folder a model. It is fetched last, so a folder that has one is whole.
pub const CONFIG: &str = "config.json";

/// Says which weight file holds which tensor.
pub const INDEX: &str = "model.safetensors.index.json";

/// Whether `path` names a GGUF file.
pub fn is_gguf(path: &str) -> bool {
    path.len() > ".gguf".len() && path.to_ascii_lowercase().ends_with(".gguf")
}

/// Whether `path`, joined to a folder of the cache, stays inside it and clear of the cache's own hidden files.
pub fn is_safe_path(path: &str) -> bool {
    let is_safe = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && !part.contains(|c: char| "\\:".contains(c) || c.is_control())
    };
    path.split('/').all(is_safe)
}

/// All parts of the split GGUF that `file` is a part of, in order: `NAME-00002-of-00003.gguf` gives three names.
pub fn split_parts(file: &str) -> Option<Vec<String>> {
    let is_five_digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let (stem, extension) = is_gguf(file).then(|| file.split_at_checked(file.len() - ".gguf".len()))??;
    let (stem, count) = stem.rsplit_once("-of-")?;
    let (stem, index) = stem.rsplit_once('-')?;
    if !is_five_digits(count) || !is_five_digits(index) {
        return None;
    }
    let (index, count) = (index.parse::<u32>().ok()?, count.parse::<u32>().ok()?);
    let part = |i: u32| format!("{stem}-{i:05}-of-{count:05}{extension}");
    (1..=count).contains(&index).then(|| (1..=count).map(part).collect())
}

/// The GGUF models among `files`, sorted: each as the list of its files, where a split model counts once and only whole.
pub fn gguf_models(files: &[String]) -> Vec<Vec<String>> {
    let mut ggufs: Vec<&String> = files.iter().filter(|file| is_gguf(file)).collect();
    ggufs.sort();
    let model_of = |file: &String| match split_parts(file) {
        None => Some(vec![file.clone()]),
        Some(parts) if parts[0] == *file && parts.iter().all(|part| files.contains(part)) => Some(parts),
        Some(_) => None,
    };
    ggufs.into_iter().filter_map(model_of).collect()
}

/// The model that is meant when a repository is named without a file: its only one, else its only Q4_K_M.
/// Projectors and importance matrices are not models. `Err` lists the first files of the candidates.
pub fn preferred_gguf(models: &[Vec<String>]) -> Result<Vec<String>, Vec<String>> {
    let has = |model: &[String], word: &str| model[0].to_ascii_lowercase().contains(word);
    let candidates: Vec<_> = models.iter().filter(|m| !has(m, "mmproj") && !has(m, "imatrix")).collect();
    let middle: Vec<_> = candidates.iter().filter(|m| has(m, "q4_k_m")).collect();
    match (&candidates[..], &middle[..]) {
        ([model], _) => Ok((*model).clone()),
        (_, [model]) => Ok((**model).clone()),
        _ => Err(candidates.iter().map(|model| model[0].clone()).collect()),
    }
}

/// The files of a safetensors folder before its weights are chosen: those of [`FOLDER_FILES`] and the index that are
/// in `files`, `config.json` last. `None` if `files` is no such folder.
pub fn folder_files(files: &[String]) -> Option<Vec<String>> {
    let has = |name: &str| files.iter().any(|file| file == name);
    let is_folder = has(CONFIG) && files.iter().any(|file| is_root_safetensors(file));
    let wanted = std::iter::once(INDEX).chain(FOLDER_FILES);
    is_folder.then(|| wanted.filter(|name| has(name)).map(String::from).collect())
}

/// The weight files among `files` where there is no index: `model.safetensors` alone if it is there, since what lies
/// beside it is a second copy in another layout.
pub fn folder_weights(files: &[String]) -> Vec<String> {
    let single = "model.safetensors";
    if files.iter().any(|file| file == single) {
        return vec![single.into()];
    }
    let mut weights: Vec<String> = files.iter().filter(|file| is_root_safetensors(file)).cloned().collect();
    weights.sort();
    weights
}

/// Whether a safetensors folder is read through its entry `name`.
pub fn is_of_folder(name: &str) -> bool {
    name == INDEX || FOLDER_FILES.contains(&name) || is_root_safetensors(name)
}

fn is_root_safetensors(file: &str) -> bool {
    file.ends_with(".safetensors") && !file.contains('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn split_names() {
        assert_eq!(
            split_parts("d/m-00002-of-00002.gguf"),
            Some(names("d/m-00001-of-00002.gguf d/m-00002-of-00002.gguf"))
        );
        for text in [
            "m.gguf",
            "m-00003-of-00002.gguf",
            "m-00000-of-00002.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-00002.bin",
            ".gguf",
        ] {
            assert_eq!(split_parts(text), None, "{text}");
        }
    }

    #[test]
    fn preferred_of_several() {
        let rows = [
            ("README.md m-Q8_0.gguf", Ok("m-Q8_0.gguf")),
            ("m-Q8_0.gguf m-Q4_K_M.gguf mmproj-Q4_K_M.gguf", Ok("m-Q4_K_M.gguf")),
            (
                "b-00001-of-00002.gguf b-00002-of-00002.gguf",
                Ok("b-00001-of-00002.gguf b-00002-of-00002.gguf"),
            ),
            ("b-00001-of-00002.gguf a-Q8_0.gguf", Ok("a-Q8_0.gguf")),
            ("b-Q8_0.gguf a-F16.gguf", Err("a-F16.gguf b-Q8_0.gguf")),
            ("a-Q4_K_M.gguf UD/a-Q4_K_M.gguf", Err("UD/a-Q4_K_M.gguf a-Q4_K_M.gguf")),
            ("README.md", Err("")),
        ];
        for (files, expected) in rows {
            let found = preferred_gguf(&gguf_models(&names(files)));
            assert_eq!(found, expected.map(names).map_err(names), "{files}");
        }
    }

    #[test]
    fn folders() {
        let files = names(
            "config.json model.safetensors consolidated.safetensors tokenizer.json onnx/m.safetensors README.md",
        );
        assert_eq!(folder_files(&files), Some(names("tokenizer.json config.json")));
        assert_eq!(folder_weights(&files), names("model.safetensors"));
        assert_eq!(folder_files(&names("config.json onnx/m.safetensors")), None);
        assert_eq!(folder_files(&names("b.safetensors")), None);
        assert_eq!(
            folder_weights(&names("b.safetensors a.safetensors d/c.safetensors")),
            names("a.safetensors b.safetensors")
        );
    }

    #[test]
    fn safe_paths() {
        for good in ["m.gguf", "sub/m.gguf", "Meta Llama.gguf"] {
            assert!(is_safe_path(good), "{good}");
        }
        for bad in ["", "/m", "a//b", "../m", "a/../m", ".chosen", r"a\m", "C:m", "a\nb"] {
            assert!(!is_safe_path(bad), "{bad}");
        }
    }
}
