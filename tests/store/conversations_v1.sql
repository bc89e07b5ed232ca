-- A conversations file as format 1 wrote it. Never edit: it stands for files that people have.
CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, touched INTEGER NOT NULL,
    head TEXT REFERENCES turns(id) DEFERRABLE INITIALLY DEFERRED, model TEXT NOT NULL,
    namespace TEXT, settings TEXT NOT NULL, pinned INTEGER NOT NULL);
CREATE INDEX sessions_by_use ON sessions(touched);
CREATE INDEX sessions_by_head ON sessions(head);
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL REFERENCES sessions(id) DEFERRABLE INITIALLY DEFERRED,
    parent_id TEXT REFERENCES turns(id) DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL, tokens_before INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'streaming', 'done', 'interrupted')),
    finish_reason TEXT, seed TEXT NOT NULL, rng_draws_before INTEGER NOT NULL,
    rng_draws_after INTEGER NOT NULL, created_at REAL NOT NULL, stats TEXT NOT NULL,
    system_text TEXT, user_text TEXT NOT NULL, reply_text TEXT NOT NULL,
    prompt_ids BLOB NOT NULL, reply_ids BLOB NOT NULL);
CREATE INDEX turns_by_session ON turns(session_id);
CREATE INDEX turns_by_parent ON turns(parent_id);
CREATE INDEX turns_unfinished ON turns(state) WHERE state IN ('pending', 'streaming');
CREATE VIRTUAL TABLE turns_words USING fts5(
    user_text, reply_text, content='turns', content_rowid='seq',
    tokenize='unicode61 remove_diacritics 2');
CREATE TRIGGER turns_words_insert AFTER INSERT ON turns BEGIN
    INSERT INTO turns_words(rowid, user_text, reply_text)
    VALUES (new.seq, new.user_text, new.reply_text); END;
CREATE TRIGGER turns_words_delete AFTER DELETE ON turns BEGIN
    INSERT INTO turns_words(turns_words, rowid, user_text, reply_text)
    VALUES ('delete', old.seq, old.user_text, old.reply_text); END;
CREATE TRIGGER turns_words_update AFTER UPDATE OF user_text, reply_text ON turns BEGIN
    INSERT INTO turns_words(turns_words, rowid, user_text, reply_text)
    VALUES ('delete', old.seq, old.user_text, old.reply_text);
    INSERT INTO turns_words(rowid, user_text, reply_text)
    VALUES (new.seq, new.user_text, new.reply_text); END;
INSERT INTO sessions VALUES (1, '01jz0000000000000000000001', 'Rome', 1.8e9, 1.8e9, 1,
    NULL, 'SmolLM2', 'abcd', '{"top_k": 5}', 1);
INSERT INTO turns VALUES (1, '01jz0000000000000000000002', '01jz0000000000000000000001', NULL,
    1, 0, 'done', 'stop', '42', 0, 2, 1.8e9, '{}', 'be brief', 'when in Rome?', 'Do as they do.',
    x'0100000002000000', x'ff000100');
INSERT INTO turns VALUES (2, '01jz0000000000000000000003', '01jz0000000000000000000001',
    '01jz0000000000000000000002', 2, 3, 'streaming', NULL, '42', 2, 3, 1.8e9, '{}', NULL,
    'and in Milan?', 'The sa', x'03000000', x'04000000');
UPDATE sessions SET head = '01jz0000000000000000000003';
PRAGMA application_id = 0x63686B76;
PRAGMA user_version = 1;
